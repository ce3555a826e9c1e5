"""The driver's side of the runtime: ranks as Ray actors, started, instructed and stopped."""
