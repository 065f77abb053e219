"""The notebook of the examples, run by a kernel, and how a kernel is interrupted."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent

INTERRUPTED = """
import os, signal

again = APPO(Corridor, experiment="corridor", num_workers=1, report_interval_sec=0.2)
before = again.env_steps
try:
    again.train(10**9, lambda row: os.kill(os.getpid(), signal.SIGINT))
except KeyboardInterrupt:
    print("interrupted", again.env_steps > before)
before = again.env_steps
again.train(500)
print("went on", again.env_steps >= before + 500)
again.close()
"""


@pytest.mark.filterwarnings("default")  # of the packages that run it
def test_the_notebook_runs_and_an_interrupted_kernel_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = nbformat.read(ROOT / "examples" / "notebook.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "outputs are stripped"
    notebook.cells.append(nbformat.v4.new_code_cell(INTERRUPTED))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    where = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=60, kernel_name="python3", resources=where).execute()
    printed = ["".join(output.get("text", "") for output in cell.get("outputs", [])) for cell in notebook.cells]
    assert (tmp_path / "train_dir" / "corridor" / "checkpoints").is_dir()
    assert "right\n" in printed, "what was learned"
    assert "interrupted True" in printed[-1]
    assert "went on True" in printed[-1]
