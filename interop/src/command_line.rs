//! A command line at work in a project: ours or one of Node's, started on a database, what it says, how it ends.

use crate::{Db, modules, node_program, patiently};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader};
use tokio::process::Child;
use tokio::task::JoinHandle;

/// A program that runs a folder of tasks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CommandLine {
    /// Ours, at this path: `env!("CARGO_BIN_EXE_ours")`, which only tests know.
    Ours(&'static str),
    /// That of a release of Node's, by the name of its package.
    Nodes(&'static str),
}

impl CommandLine {
    /// The program, for arguments of one's own.
    pub fn command(self) -> Command {
        let mut command = match self {
            CommandLine::Ours(program) => Command::new(program),
            CommandLine::Nodes(package) => {
                let mut command = Command::new(node_program());
                command.arg(modules().join(package).join("dist/cli.js"));
                command
            }
        };
        for (name, _) in std::env::vars_os() {
            let name = name.to_string_lossy().into_owned();
            if ["RUST_LOG", "NO_LOG_SUCCESS"].contains(&&*name) || name.starts_with("GRAPHILE_") {
                command.env_remove(name);
            }
        }
        // Tasks run in the same Node under both.
        command.env("GRAPHILE_WORKER_NODE", node_program());
        command
    }

    /// Starts it in a project.
    pub fn start(self, db: &Db, project: &Path, arguments: &[&str]) -> AtWork {
        self.start_with(db, project, arguments, &[])
    }

    /// The same with something more in its environment.
    pub fn start_with(self, db: &Db, project: &Path, arguments: &[&str], environment: &[(&str, &str)]) -> AtWork {
        let mut command = self.command();
        command.args(arguments).current_dir(project).env("DATABASE_URL", db.url()).envs(environment.iter().copied());
        AtWork::start(command)
    }

    /// Runs what there is, and returns what it said and how it ended.
    pub async fn runs_once(self, db: &Db, project: &Path) -> Ended {
        self.start(db, project, &["--once"]).ended().await
    }
}

/// How a command line ended.
#[derive(Debug)]
pub struct Ended {
    /// Its exit code, or the signal that ended it.
    pub status: ExitStatus,
    /// All that it wrote.
    pub log: String,
}

/// A command line that runs. Dropped, it is killed.
#[derive(Debug)]
pub struct AtWork {
    child: Child,
    log: Arc<Mutex<String>>,
    readers: Vec<JoinHandle<()>>,
}

impl AtWork {
    fn start(command: Command) -> AtWork {
        let mut command = tokio::process::Command::from(command);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().expect("it starts");
        let log = Arc::default();
        let readers = vec![
            tokio::spawn(gather(child.stdout.take().expect("a pipe"), Arc::clone(&log))),
            tokio::spawn(gather(child.stderr.take().expect("a pipe"), Arc::clone(&log))),
        ];
        AtWork { child, log, readers }
    }

    /// What it wrote so far.
    pub fn log(&self) -> String {
        self.log.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Waits until it has written this.
    pub async fn says(&self, what: &str) {
        patiently(&format!("{what:?} in its log"), async {
            while !self.log().contains(what) {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        })
        .await;
    }

    /// Sends it a signal, by its name without `SIG`.
    pub fn signal(&self, name: &str) {
        let pid = self.child.id().expect("it has not ended");
        let sent = Command::new("kill").args([&format!("-{name}"), &pid.to_string()]).status();
        assert!(sent.expect("kill runs").success());
    }

    /// Waits for its end.
    pub async fn ended(mut self) -> Ended {
        let status = patiently("the command line to end", self.child.wait()).await.expect("its end");
        for reader in std::mem::take(&mut self.readers) {
            patiently("all that it wrote", reader).await.expect("no panic");
        }
        Ended { status, log: self.log() }
    }
}

async fn gather(pipe: impl AsyncRead + Unpin, log: Arc<Mutex<String>>) {
    let mut lines = BufReader::new(pipe).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        let mut log = log.lock().unwrap_or_else(PoisonError::into_inner);
        log.push_str(&line);
        log.push('\n');
    }
}
