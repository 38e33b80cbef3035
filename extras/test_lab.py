"""docs/lab.html opens without an error, and each of its ten figures has its numbers."""

import html
import json
import re
import shutil
import subprocess

import pytest

from tests.harness import HERE

CHROME = shutil.which("chromium") or shutil.which("google-chrome")
PROBE = """<script>
const errors = [];
addEventListener("error", (event) => errors.push(event.message));
console.error = (...words) => errors.push(words.join(" "));
const figures = {};
for (const {id} of all("section")) {
  for (const preset of all(`#${id} button.preset`)) preset.click();  // each setting of the figure
  from_address("#");
  figures[id] = $(id).innerText;
}
document.body.append(make("pre", {id: "report", textContent: JSON.stringify({errors, figures})}));
</script></body>"""
NUMBERS = {  # figure: what it says at first
    "wall": "112 GB", "ring": "120 ms", "zero": "62.5 GB", "pipe": "bubble 27.3% of 33",
    "own": "42.9%", "tensor": "906 MB", "context": "in all 1.75 times the mean",
    "experts": "98 of 128 choices", "grid": "14.1 GB", "calc": "leaves 18.14 GB"}


def test_links_lead_to_files_that_exist():
    for link in re.findall(r'href="([^"#:]+)"', (HERE / "docs/lab.html").read_text()):
        assert (HERE / "docs" / link).exists(), link


@pytest.mark.skipif(not CHROME, reason="no Chromium: docs/lab.html is not opened")
def test_ten_figures_have_their_numbers(tmp_path):
    page = (HERE / "docs/lab.html").read_text().replace("</body>", PROBE)
    (tmp_path / "page.html").write_text(page)
    dom = subprocess.run(
        [CHROME, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom",
         f"--user-data-dir={tmp_path}/profile", "--virtual-time-budget=30000",
         (tmp_path / "page.html").as_uri()],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=300).stdout
    report = json.loads(html.unescape(re.search(r'<pre id="report">(.*?)</pre>', dom, re.S)[1]))
    assert not report["errors"]
    assert report["figures"].keys() == NUMBERS.keys()
    for figure, number in NUMBERS.items():
        assert number in report["figures"][figure], report["figures"][figure]
