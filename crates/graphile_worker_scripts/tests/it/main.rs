//! Tasks in other languages, run by real programs on a real PostgreSQL.

#![allow(missing_docs, clippy::unwrap_used)]
#![cfg(unix)]

mod host_conformance;
mod host_crashes;
mod hosts;
#[allow(dead_code)]
#[path = "../../../graphile_worker/tests/it/support.rs"]
mod support;
mod tasks_dir;
