-- The tables of the history. Another table or column needs another SCHEMA_VERSION in file.py.
-- `row`, `low` and `high` are the values of a layout's series as packed float64, in its order.
CREATE TABLE layout (id INTEGER PRIMARY KEY AUTOINCREMENT, series TEXT NOT NULL UNIQUE);
CREATE TABLE tick (time_ms INTEGER PRIMARY KEY, layout INTEGER NOT NULL, row BLOB NOT NULL);
CREATE TABLE steps (
  id INTEGER PRIMARY KEY AUTOINCREMENT, run TEXT NOT NULL, rank INTEGER NOT NULL, first_step INTEGER NOT NULL,
  count INTEGER NOT NULL, time_ms INTEGER NOT NULL, offset_ns INTEGER NOT NULL, columns BLOB NOT NULL);
CREATE INDEX steps_by_run ON steps (run, rank, first_step);
CREATE INDEX steps_by_time ON steps (time_ms);
CREATE TABLE run (run TEXT NOT NULL, rank INTEGER NOT NULL, time_ms INTEGER NOT NULL, record BLOB NOT NULL,
  PRIMARY KEY (run, rank));
CREATE TABLE gpu (uuid TEXT PRIMARY KEY, record BLOB NOT NULL);
CREATE TABLE finding (run TEXT NOT NULL, rank INTEGER NOT NULL, cause TEXT NOT NULL, gpu TEXT NOT NULL,
  since_ms INTEGER NOT NULL, seen_ms INTEGER NOT NULL, record TEXT NOT NULL,
  PRIMARY KEY (run, rank, cause, gpu, since_ms));
CREATE TABLE tick_minute (time_ms INTEGER PRIMARY KEY, layout INTEGER NOT NULL, row BLOB NOT NULL, low BLOB NOT NULL,
  high BLOB NOT NULL);
CREATE TABLE step_minute (
  id INTEGER PRIMARY KEY AUTOINCREMENT, run TEXT NOT NULL, rank INTEGER NOT NULL, first_step INTEGER NOT NULL,
  count INTEGER NOT NULL, time_ms INTEGER NOT NULL, record BLOB NOT NULL);
CREATE INDEX step_minute_by_run ON step_minute (run, rank, time_ms);
CREATE INDEX step_minute_by_time ON step_minute (time_ms);
