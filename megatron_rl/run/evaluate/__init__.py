"""An evaluation outside a run: a policy answers each problem k times. It can be interrupted and resumed."""
