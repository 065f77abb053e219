"""The notebook of the examples, run by a kernel, and how a kernel is interrupted."""

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
NOTEBOOK = ROOT / "examples" / "notebook.ipynb"

INTERRUPTED = """
import os, signal, threading, time

again = APPO(Corridor, experiment="corridor", num_workers=1, report_interval_sec=0.2)
before = again.env_steps

def interrupt():
    while again.env_steps < before + 100:
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt).start()
try:
    again.train(10**9)
except KeyboardInterrupt:
    print("interrupted", again.env_steps > before)
"""
GO_ON = """
before = again.env_steps
again.train(500)
print("went on", again.env_steps >= before + 500)
again.close()
again.close()
print("left", [process.name for process in again.crew.processes if process.is_alive()])
"""


def run(notebook: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run a notebook as it is shown; return what each cell has printed."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    NotebookClient(notebook, timeout=60, kernel_name="python3", resources={"metadata": {"path": str(folder)}}).execute()
    return ["".join(output.get("text", "") for output in cell.get("outputs", [])) for cell in notebook.cells]


@pytest.mark.filterwarnings("default")  # of the packages that run it
def test_the_notebook_runs_and_an_interrupted_kernel_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "outputs are stripped"
    notebook.cells += [nbformat.v4.new_code_cell(source) for source in (INTERRUPTED, GO_ON)]
    printed = run(notebook, tmp_path, monkeypatch)
    assert (tmp_path / "train_dir" / "corridor" / "checkpoints").is_dir()
    assert "right\n" in printed, "what was learned"
    assert "interrupted True" in printed[-2]
    assert "went on True" in printed[-1]
    assert "left []" in printed[-1]
