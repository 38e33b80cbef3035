"""The doctor: compares two steps of a trainer, ours or any other, with one process's, and names the
bug if they differ. Needs the root, data/ and run/."""
