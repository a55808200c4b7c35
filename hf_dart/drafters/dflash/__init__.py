"""DFlash drafters, as they are published."""
