"""The part of planning that is the same for all targets: lengths become tables, parameters and
bytes."""
