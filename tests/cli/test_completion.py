"""``mxquant completion``: scripts that complete commands, options, choices and paths."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from mxquant.cli.main import main


def script(shell):
    result = CliRunner().invoke(main, ["completion", shell])
    assert result.exit_code == 0
    return result.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_that_of_the_shell_and_needs_no_shell_to_be_printed(shell, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert f"_MXQUANT_COMPLETE={shell}_complete" in script(shell)


def completed(shell, line):
    """What our command answers a shell: in bash's manner, a line of ``kind,value`` each."""
    words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - (not line.endswith(" ")))}
    env = {**os.environ, **words, "_MXQUANT_COMPLETE": f"{shell}_complete"}
    program = "from mxquant.cli.main import main; main(prog_name='mxquant')"
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("line", "answers"),
    [
        ("mxquant ver", ["plain,verify"]),
        ("mxquant verify --sa", ["plain,--sample"]),
        ("mxquant quantize x --format nv", ["plain,nvfp4"]),
        ("mxquant inspect ./mod", ["file,./mod"]),
    ],
)
def test_commands_options_choices_and_paths_are_completed(line, answers):
    assert completed("bash", line) == answers


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_bash_takes_the_script(tmp_path):
    command = tmp_path / "mxquant"
    command.write_text(f"#!{sys.executable}\nfrom mxquant.cli.main import main\nmain(prog_name='mxquant')\n")
    command.chmod(0o755)
    (tmp_path / "completion.bash").write_text(script("bash"))
    ask = "COMP_WORDS=(mxquant insp); COMP_CWORD=1; _mxquant_completion mxquant; echo ${COMPREPLY[@]}"
    env = {**os.environ, "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", f"source {tmp_path}/completion.bash; {ask}"],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["inspect"], done.stderr
