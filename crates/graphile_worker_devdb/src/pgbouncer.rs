//! A private PgBouncer in front of a cluster, for tests that need a real pooler. Only the address, the server
//! and the test's settings are configured; everything else is PgBouncer's default.

use crate::cluster::{free_port, last_lines, random_hex, write_private};
use crate::error::Context;
use crate::programs::ServerUser;
use crate::{Cluster, Error};
use std::fs::File;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const START_TIMEOUT: Duration = Duration::from_secs(180);

/// Runs PgBouncer until standard input is closed, so that a killed test process leaves nothing running.
const UNTIL_STDIN_ENDS: &str = r#""$@" <&- & pooler=$!; cat >/dev/null; kill "$pooler" 2>/dev/null; wait "$pooler""#;

/// A running PgBouncer. It stops when this is dropped or the process ends.
#[derive(Debug)]
pub struct PgBouncer {
    port: u16,
    password: String,
    folder: PathBuf,
    program: PathBuf,
    server_user: ServerUser,
    process: Option<Child>,
}

impl Cluster {
    /// Starts a PgBouncer in front of this cluster with these settings, such as `("pool_mode", "transaction")`.
    pub fn pgbouncer(&self, settings: &[(&str, &str)]) -> Result<PgBouncer, Error> {
        let program = find()?;
        let mut attempts_left = 5;
        loop {
            attempts_left -= 1;
            match self.try_pgbouncer(&program, settings) {
                // Another process has taken the port before PgBouncer started.
                Err(Error::Program { output, .. })
                    if attempts_left > 0 && output.contains("Address already in use") => {}
                started => return started,
            }
        }
    }

    fn try_pgbouncer(&self, program: &Path, settings: &[(&str, &str)]) -> Result<PgBouncer, Error> {
        let port = free_port()?;
        let folder = self.folder.server().join(format!("pgbouncer-{}", &random_hex()?[..12]));
        std::fs::create_dir(&folder).context(|| format!("create {}", folder.display()))?;
        let mut text = format!(
            "[databases]\n* = host=127.0.0.1 port={}\n[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\n\
             unix_socket_dir =\nauth_file = {}\n",
            self.port,
            folder.join("users.txt").display()
        );
        for (name, value) in settings {
            text.push_str(&format!("{name} = {value}\n"));
        }
        let config = folder.join("pgbouncer.ini");
        write_private(&config, &text)?;
        write_private(&folder.join("users.txt"), &format!("\"postgres\" \"{}\"\n", self.password))?;
        let server_user = self.folder.server_user.clone();
        if let ServerUser::Other { name, uid, gid } = &server_user {
            for path in [&folder, &config, &folder.join("users.txt")] {
                chown(path, Some(*uid), Some(*gid)).context(|| format!("give {} to {name}", path.display()))?;
            }
        }
        let (password, program) = (self.password.clone(), program.to_owned());
        let mut pooler = PgBouncer { port, password, folder, program, server_user, process: None };
        pooler.start()?;
        Ok(pooler)
    }
}

impl PgBouncer {
    /// Starts it again on the same port, after [`stop`](PgBouncer::stop).
    pub fn start(&mut self) -> Result<(), Error> {
        let log_path = self.folder.join("log");
        let log = File::create(&log_path).context(|| format!("create {}", log_path.display()))?;
        let log_again = log.try_clone().context(|| "share the log".to_owned())?;
        let mut command = Command::new("sh");
        command.args(["-c", UNTIL_STDIN_ENDS, "pgbouncer"]).arg(&self.program).arg(self.folder.join("pgbouncer.ini"));
        if let ServerUser::Other { uid, gid, .. } = &self.server_user {
            // PgBouncer does not run as root.
            command.uid(*uid).gid(*gid);
        }
        command.current_dir("/").stdin(Stdio::piped()).stdout(log).stderr(log_again).process_group(0);
        self.process = Some(command.spawn().context(|| "start pgbouncer".to_owned())?);
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, self.port));
        let deadline = Instant::now() + START_TIMEOUT;
        loop {
            let log = std::fs::read(&log_path).unwrap_or_default();
            if String::from_utf8_lossy(&log).contains("FATAL") || Instant::now() > deadline {
                return Err(Error::Program { program: "pgbouncer", output: last_lines(&log) });
            }
            if TcpStream::connect_timeout(&address, Duration::from_secs(1)).is_ok() {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Stops it. Its clients lose their connections.
    pub fn stop(&mut self) {
        if let Some(mut process) = self.process.take() {
            drop(process.stdin.take());
            let _ = process.wait();
        }
    }

    /// The URL of a database through this pooler.
    pub fn url(&self, database: &str) -> String {
        format!("postgres://postgres:{}@127.0.0.1:{}/{database}", self.password, self.port)
    }
}

impl Drop for PgBouncer {
    fn drop(&mut self) {
        self.stop();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// Finds the program: on the `PATH`, or in Debian's `/usr/sbin`, which is not on every user's `PATH`.
fn find() -> Result<PathBuf, Error> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain(["/usr/sbin", "/opt/homebrew/bin"].map(PathBuf::from));
    folders.map(|folder| folder.join("pgbouncer")).find(|program| program.is_file()).ok_or(Error::NoPgBouncer)
}
