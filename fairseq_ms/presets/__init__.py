"""Every row of the papers' tables, one file a paper."""
