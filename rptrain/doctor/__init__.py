"""What `rptrain doctor` looks at: is this machine fit to train, and what to do where it is not."""
