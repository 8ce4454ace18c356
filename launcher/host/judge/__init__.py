"""Pure: what an attempt left behind -> how it ended, why, and what becomes of the job."""
