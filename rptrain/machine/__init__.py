"""The machine that a run is planned for: its devices, memory and measured rates; or one that flags describe."""
