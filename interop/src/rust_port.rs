//! The Rust port, the `graphile_worker` of crates.io, as a process; see `bench/rust_port/src/interop.rs`.

use crate::{Db, patiently};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use tokio::sync::mpsc;

/// A worker of the port. It is killed when this is dropped.
#[derive(Debug)]
pub struct RustPort {
    child: Child,
    stdin: ChildStdin,
    lines: mpsc::UnboundedReceiver<String>,
    said: Vec<String>,
}

impl RustPort {
    /// Installs the port's schema.
    pub fn installs(db: &Db) {
        let output = command("install", db).output().expect("the port runs");
        assert!(output.status.success(), "{output:?}");
    }

    /// Adds jobs through the port's API, a JSON object each.
    pub fn adds(db: &Db, jobs: &[serde_json::Value]) {
        let mut child = command("add", db).stdin(Stdio::piped()).spawn().expect("the port runs");
        let mut stdin = child.stdin.take().expect("a pipe");
        for job in jobs {
            writeln!(stdin, "{job}").expect("the port reads");
        }
        drop(stdin);
        let status = child.wait().expect("the port ends");
        assert!(status.success(), "{status}");
    }

    /// Starts a worker as the port does by default, without recovery, and waits until it runs jobs.
    pub async fn starts(db: &Db) -> RustPort {
        RustPort::start("run", db).await
    }

    /// The same with recovery.
    pub async fn starts_with_recovery(db: &Db) -> RustPort {
        RustPort::start("recover", db).await
    }

    async fn start(what: &str, db: &Db) -> RustPort {
        let mut child = command(what, db).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("the port runs");
        let (sender, lines) = mpsc::unbounded_channel();
        let stdout = BufReader::new(child.stdout.take().expect("a pipe"));
        std::thread::spawn(move || stdout.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
        let stdin = child.stdin.take().expect("a pipe");
        let mut port = RustPort { child, stdin, lines, said: Vec::new() };
        port.says("ready").await;
        port
    }

    /// Waits until it has said this.
    pub async fn says(&mut self, line: &str) {
        while !self.said.iter().any(|said| said == line) {
            let said = patiently(&format!("the port to say {line:?}"), self.lines.recv()).await;
            self.said.push(said.unwrap_or_else(|| panic!("the port has ended and did not say {line:?}")));
        }
    }

    /// Lets one of its jobs end that wait for that.
    pub fn lets_one_end(&mut self) {
        writeln!(self.stdin, "go").expect("the port reads");
    }

    /// Kills it, and waits until it has said the rest: all lines that it has ever said.
    pub async fn is_killed(mut self) -> Vec<String> {
        self.child.kill().expect("a process");
        self.child.wait().expect("a process");
        while let Some(line) = self.lines.recv().await {
            self.said.push(line);
        }
        std::mem::take(&mut self.said)
    }
}

impl Drop for RustPort {
    fn drop(&mut self) {
        // It has ended, unless the test has failed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn command(what: &str, db: &Db) -> Command {
    let mut command = Command::new(program());
    command.args([what, db.url()]).env_remove("DATABASE_URL");
    command
}

fn program() -> PathBuf {
    let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("../bench/rust_port/target/debug/rust_port");
    assert!(program.exists(), "{} is not there: run `make interop`, which builds it", program.display());
    program
}
