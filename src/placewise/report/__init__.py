"""What people see: explanations, tables, pictures, pages, traces."""
