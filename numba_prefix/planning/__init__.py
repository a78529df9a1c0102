"""From checked lengths to tables, parameters and bytes: everything about a run that the target does not decide."""
