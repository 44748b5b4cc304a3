//! The library against a real PostgreSQL: each test has a database of its own, all run in parallel.

#![allow(missing_docs, clippy::unwrap_used)]

mod add_job;
mod add_jobs;
mod admin;
mod cleanup;
mod cron;
mod documented_sql;
mod hooks;
mod host_conformance;
mod hosts;
mod inspect;
mod job_key;
mod migrate;
mod odd_rows;
mod old_layouts;
mod outages;
mod plans;
mod processes;
mod races;
mod recovery;
mod releases;
mod search_path;
mod spec_snippets;
mod sql_files;
mod support;
#[cfg(unix)]
mod tasks_dir;
mod upgrade;
mod utils;
mod worker;
