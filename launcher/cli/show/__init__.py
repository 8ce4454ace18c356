"""How runs, plans and endings look: tables, lines and live panels. Decides nothing."""
