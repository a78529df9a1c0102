"""The operator inside other libraries: one module for each, which imports that library."""
