"""What is printed never steers the terminal, and a reader that leaves ends a command silently."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager, redirect_stderr
from pathlib import Path

import pytest
from rich.table import Table
from synthetic_job import job_spec

from autotune.cli import OUTPUT_CLOSED, main
from autotune.commands.render.tables import table_text
from autotune.commands.render.terminal import Terminal
from autotune.jobs.processes import Launched
from autotune.printing import printable
from autotune.storage.store import Store

STEERING = "\x1b]0;owned\x07\x1b[2J\r\x9b31m\u202e\udc80"
ENDS_WITHIN_S = 60.0
ESCAPED = r"\x1b]0;owned\x07\x1b[2J\r\x9b31m\u202e\udc80"


@contextmanager
def closed_pipe():
    """A stream whose reader is gone."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", encoding="utf-8") as stream:
        yield stream


@pytest.fixture
def jobs(tmp_path):
    with Store.open(tmp_path / "autotune.db") as store:
        store.create_job("job", job_spec())
    return tmp_path


def test_control_characters_become_escapes_and_lines_stay():
    assert printable(f"a\tb\n{STEERING}ü") == f"a\tb\n{ESCAPED}ü"


def test_a_result_and_an_error_show_names_with_escapes(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("autotune.commands.init.run", lambda options: ({}, f"model {STEERING}"))
    assert main(["init", str(tmp_path / "new")]) == 0
    assert capsys.readouterr().out == f"model {ESCAPED}\n"
    (tmp_path / "c.yaml").write_text('hosts: [{name: "\\e[2J", devices: 0}]', encoding="utf-8")
    words = ["optimize", "bert-base", "--cluster", str(tmp_path / "c.yaml")]
    assert main(words) == 2
    assert "\x1b" not in (error := capsys.readouterr().err) and r"\x1b[2J" in error
    assert main([*words, "--json"]) == 2
    assert "\x1b" not in (output := capsys.readouterr().out)
    assert r"\x1b[2J" in json.loads(output)["error"]


def test_progress_shows_names_with_escapes_and_tables_show_brackets(monkeypatch):
    terminal = Terminal()
    with terminal.capture() as captured:
        terminal.print(f"[bold]{STEERING}[/bold]", highlight=False, soft_wrap=True)
    assert captured.get().strip() == ESCAPED
    table = Table("name")
    table.add_row("[/x] [red]a[0] :smile:")
    assert "[/x] [red]a[0] :smile:" in table_text(table)


@pytest.mark.parametrize("variable", ["FORCE_COLOR", "TTY_COMPATIBLE"])
def test_a_table_is_plain_text_also_if_colors_are_forced(monkeypatch, variable):
    monkeypatch.setenv(variable, "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    table = Table("name")
    table.add_row("a")
    assert "\x1b" not in table_text(table)


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["show", "--help"],
        ["show"],
        ["show", "--json"],
        ["show", "job"],
        ["show", "absent", "--json"],
        ["strategies", "vgg16", "A2"],
    ],
)
def test_a_reader_that_leaves_ends_a_command_silently(jobs, capsys, monkeypatch, words):
    monkeypatch.chdir(jobs.parent)
    if words[0] == "show" and "--help" not in words:
        words = [*words, "--directory", str(jobs)]
    with closed_pipe() as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        try:
            status = main(words)
        except SystemExit:
            pytest.fail("the status of a closed output is lost")
        assert status == OUTPUT_CLOSED
    assert "Traceback" not in (error := capsys.readouterr().err) and "Broken pipe" not in error


def test_the_process_ends_with_the_status_of_a_closed_pipe_and_says_nothing(jobs):
    command = [sys.executable, "-m", "autotune", "show", "--directory", str(jobs)]
    with closed_pipe() as stream:
        ended = subprocess.run(command, stdout=stream, stderr=subprocess.PIPE, check=False)
    assert (ended.returncode, ended.stderr) == (141, b"")


def test_a_full_disk_under_the_output_is_one_message(jobs, capsys, monkeypatch):
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["show", "--directory", str(jobs)]) == 1
        assert capsys.readouterr().err.endswith("the result: No space left on device\n")


def test_progress_goes_on_without_its_reader():
    with closed_pipe() as stream, redirect_stderr(stream):
        terminal = Terminal()
        terminal.print("trial 1")
        terminal.print("trial 2")
        assert terminal.quiet
        stream.write("at the end")
        stream.flush()


def test_a_script_goes_on_without_the_reader_of_its_output():
    """It prints more than a pipe holds, so it would wait for us."""
    code = "print('a line of output\\n' * 20_000, 'at the end')"
    with closed_pipe() as stream, redirect_stderr(stream):
        launched = Launched([sys.executable, "-c", code])
        with launched.signals_passed_on():
            status = launched.wait(time.monotonic() + ENDS_WITHIN_S, lambda: False)
        assert (status, launched.last_output()[-10:]) == (0, "at the end")
        stream.write("the next message")
        stream.flush()


def test_an_encoding_without_a_character_does_not_end_a_command(monkeypatch, jobs):
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", output)
    monkeypatch.setattr("autotune.commands.show.run", lambda options: ({}, "± 1 µs"))
    assert main(["show", "--directory", str(jobs)]) == 0
    assert output.buffer.getvalue() == b"\\xb1 1 \\xb5s\n"


def test_a_refusal_of_the_system_is_one_message(capsys, monkeypatch, tmp_path):
    def refused(options):
        return (tmp_path / ("x" * 300)).read_text(), ""

    monkeypatch.setattr("autotune.commands.show.run", refused)
    assert main(["show"]) == 1
    error = capsys.readouterr().err
    assert "File name too long; check paths, permissions and free space" in error


def test_a_folder_of_jobs_without_search_permission_is_one_message(
    capsys, tmp_path, without_privileges
):
    closed = tmp_path  # below a folder that is its owner's only
    if os.getuid() != 0:
        closed = tmp_path / "closed"
        closed.mkdir(mode=0)
    assert main(["show", "--directory", str(closed / "jobs")]) in (1, 2)
    error = capsys.readouterr().err
    assert f"{closed}/jobs/autotune.db: Permission denied; check paths, permissions" in error


def test_a_path_of_a_store_is_no_job(capsys, jobs):
    assert main(["show", str(jobs / "autotune.db"), "--directory", str(jobs)]) == 2
    assert f"job '{jobs}/autotune.db' is not in {jobs}/autotune.db" in capsys.readouterr().err
    assert main(["tune", str(jobs / "autotune.db"), "--directory", str(jobs)]) == 2
    assert "autotune.db must be " in capsys.readouterr().err


def test_an_export_to_a_device_is_refused_and_the_device_stays(capsys):
    words = ["optimize", "vgg16", "--cluster", "A2", "--budget-time", "1ms", "--output"]
    assert main([*words, "/dev/null"]) == 2
    assert "/dev/null must be a regular file, but is a device" in capsys.readouterr().err
    assert Path("/dev/null").is_char_device()
