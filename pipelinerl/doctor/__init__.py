"""Find why a run does not learn: rules over recipes and over the records of runs (docs/doctor.md)."""
