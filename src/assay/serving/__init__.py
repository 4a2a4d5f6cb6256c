"""What launches servers: `assay doctor` finds the setting that breaks a serve command; bundles carry its evidence."""
