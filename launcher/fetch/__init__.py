"""What a run reads from the internet, fetched where there is one."""
