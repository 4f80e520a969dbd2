from disagg_sim.cli.progress import Lines, ProgressBar, listener


def test_off_a_terminal_there_are_plain_lines():
    assert isinstance(listener(), Lines)


def test_lines_tell_how_far_how_fast_and_how_long(capsys, monkeypatch):
    clock = iter([100.0, 101.0, 102.0, 104.0, 110.0])  # the first after 1 s, then 1,000 in 1, 2 and 6 s
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    lines = Lines(interval=2.0)
    lines.start(4_000)
    for points in (1_000, 1_000, 1_000):
        lines.advance(points)
    lines.advance(1_000)
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "2,000 of 4,000 design points (50%), 1,000/s, 2 s left",
        "3,000 of 4,000 design points (75%), 750/s, 2 s left",
        "4,000 of 4,000 design points (100%), 400/s, 0 s left",
    ]


def test_the_time_in_which_workers_start_is_no_measure_of_what_is_left(capsys, monkeypatch):
    clock = iter([0.0, 60.0, 61.0, 66.0])  # a minute until the first block, then one block of 100 a second
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    lines = Lines()
    lines.start(1_000)
    for points in (100, 100, 500):
        lines.advance(points)
    assert capsys.readouterr().err.splitlines() == [
        "100 of 1,000 design points (10%), 2/s",
        "700 of 1,000 design points (70%), 11/s, 3 s left",
    ]


def test_nothing_to_compute_says_nothing(capsys):
    lines = Lines()
    lines.start(0)
    lines.finish()
    assert capsys.readouterr().err == ""


def test_the_bar_shows_notes_and_the_total(capsys):
    bar = ProgressBar()
    bar.note("3 of 9 blocks already stored")
    bar.start(500)
    bar.advance(500)
    bar.finish()
    said = capsys.readouterr().err
    assert "3 of 9 blocks already stored" in said
    assert "500 design points computed" in said
