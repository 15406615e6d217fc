"""One file per question; each answers with ratios of two things measured in one run.

A bench module has `SUMMARY`, one line for `regrow bench --help`, and `run(*, quick, json_path) -> int`, which may have
further options with defaults. It returns 0 when it could measure, whether or not a target is met, and says plainly
which targets are missed. Only `soak`, which is a test, returns 1 for those.
"""
