"""Services of a rank in any role: world and groups, requests to leave, activity, black box."""
