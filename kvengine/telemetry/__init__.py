"""What a run leaves behind: columns while it runs, a directory of tables, spans made from them afterwards."""
