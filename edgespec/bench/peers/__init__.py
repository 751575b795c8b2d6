"""Other engines that the speed benchmark runs beside edgespec. Each is optional."""
