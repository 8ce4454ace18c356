"""How runs, plans and endings look: tables and lines. Decides nothing."""
