//! The binary, run as a person would.

#![allow(missing_docs, clippy::unwrap_used)]

mod bad_input;
mod completions;
mod connections;
mod crontab;
mod demo;
mod dev;
mod docs;
mod limits;
mod odd_databases;
mod operate;
mod own_binary;
mod poolers;
mod roles;
mod run;
mod schema_only;
mod support;
mod terminal;
mod why;
