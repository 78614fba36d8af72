"""Where code runs that no person wrote: in bubblewrap where there is one, else under limits that the process sets itself."""
