//! The binary, run as a person would.

#![allow(missing_docs, clippy::unwrap_used)]

mod bad_input;
mod crontab;
mod demo;
mod dev;
mod operate;
mod own_binary;
mod readme;
mod run;
mod schema_only;
mod support;
mod terminal;
