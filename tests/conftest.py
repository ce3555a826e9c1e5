"""Its presence puts this folder on the import path, so that tests of every kind share `synthetic_job`."""
