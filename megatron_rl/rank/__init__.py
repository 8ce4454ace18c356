"""What any rank of any role has: its place in the world, being asked to leave, activity, black box."""
