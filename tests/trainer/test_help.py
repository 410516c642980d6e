"""--help: complete, and quick."""

import resource
import subprocess
import sys
from pathlib import Path

from trainer.compose import conf_dir
from trainer.help import first_comment, help_text


def test_help_lists_tasks_groups_and_keys():
    text = help_text(conf=conf_dir(), config_dir=None)

    assert "distill            Distils a teacher into a smaller student" in text
    assert "zero2_offload" in text
    assert "cpu_adamw" in text
    assert "trainer.max_steps" in text
    assert "models.<name>.max_grad_norm" in text
    assert "micro-batch per rank" in text, "the comment beside the schema's field"
    assert "130, 143" in text


def test_a_users_folder_stands_beside_ours(tmp_path: Path):
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "mine.yaml").write_text("# @package _global_\n# Fits a line.\ntask: {}\n")

    text = help_text(conf=conf_dir(), config_dir=tmp_path)

    assert "mine               Fits a line." in text
    assert "distill  " in text


def test_a_file_without_a_comment_has_an_empty_line(tmp_path: Path):
    (tmp_path / "a.yaml").write_text("# @package _global_\ntask: {}  # no\n# late\n")

    assert first_comment(tmp_path / "a.yaml") == ""


def test_help_is_quick_and_imports_no_torch():
    code = (
        "import sys; from trainer.__main__ import main; status = main(['--help']); "
        "assert 'torch' not in sys.modules; sys.exit(status)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert done.returncode == 0, done.stderr
    assert "usage: python -m trainer" in done.stdout
    assert seconds < 1.5, "of processor time: the wall clock depends on what else runs"
