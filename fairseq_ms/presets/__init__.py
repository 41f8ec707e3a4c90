"""Every row of the papers' tables, one file a paper; each file registers what it lists."""
