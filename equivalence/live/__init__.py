"""Live calls of an engine: read, copied, kept and watched; nothing here raises into one."""
