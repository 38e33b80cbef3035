"""The proof, by promise. `python test_all.py` runs its page, then these.

    any layout is one process               test_all.py's page, test_layouts.py, test_planted.py
    what each technique computes, sends,
    and holds, by formulas and definitions  test_collectives.py, test_zero.py, test_sequences.py,
                                            test_experts.py, test_schedules.py, test_models.py,
                                            test_optimizer.py, test_transport.py
     1 a wrong flag is one line             test_commands.py
     2 one command starts and ends all      test_survival.py
     3 a signal saves                       test_survival.py
     4 a rank that dies or stops is named   test_survival.py, test_transport.py
     5 a killed run resumes                 test_checkpoint.py
     6 any layout reads any checkpoint      test_checkpoint.py
     7 what is not finite is not saved      test_checkpoint.py
     8 weights from others and to them      test_weights.py
     9 the log, --watch                     test_commands.py
    10 files of strangers are data          test_weights.py, test_data.py, test_checkpoint.py
    what is read is what runs, who imports
    whom                                    test_house.py, test_planted.py
    the GPU's manner, without a GPU         test_gpu.py
    what a GPU shows, in eight minutes      first_gpu.py
"""
