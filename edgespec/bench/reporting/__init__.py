"""From run folders to figures, tables, pictures and the report."""
