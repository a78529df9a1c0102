"""The planning that all targets share: lengths become tables, parameters and bytes."""
