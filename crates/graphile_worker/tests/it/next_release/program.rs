//! The worker of `worker.rs`, in the next release.

#![allow(missing_docs, clippy::unwrap_used)]

mod worker;

#[tokio::main]
async fn main() {
    worker::run("new").await;
}
