"""Everything that importing the plugin changes elsewhere."""
