"""How whoever cannot ask a process finds out that it is well."""
