"""What tests share: starting ranks and hosts, checks, cases, data, models. It holds no test."""
