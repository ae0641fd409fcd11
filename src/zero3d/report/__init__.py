"""`zero3d report`: a run's folder as data, as figures, and as one page of HTML that needs no network."""
