"""What a report says, in numbers, words and pictures: of simulated runs and live ones alike. No clock, no socket."""
