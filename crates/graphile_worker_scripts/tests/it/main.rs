//! Tasks in other languages, run by real programs on a real PostgreSQL.

#![allow(missing_docs, clippy::unwrap_used)]
#![cfg(unix)]

mod cancel;
mod helpers;
mod host_conformance;
mod host_crashes;
mod host_end;
mod host_reload;
mod host_shutdown;
mod host_start;
mod rate_limited;
mod script_input;
mod script_output;
#[allow(dead_code)]
#[path = "../../../graphile_worker/tests/it/support.rs"]
mod support;
mod tasks_dir;
