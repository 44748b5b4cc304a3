//! Output on a terminal: colours, and `top`.

use crate::support::{TIMEOUT, clean, graphile_worker, installed_database, run_sql};
use graphile_worker_devdb::TestDatabase;
use rustix::fs::OFlags;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::process::{Child, Command};
use std::sync::mpsc::{Receiver, channel};
use std::time::Instant;

/// A program on a terminal of 80 by 24, and what it has written there.
struct Watched {
    child: Child,
    person: File,
    terminal: File,
    written: Receiver<Vec<u8>>,
    seen: String,
}

/// The two ends of a new terminal, and its name.
fn terminal(ws_row: u16, ws_col: u16) -> (File, File, String) {
    let person = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
    grantpt(&person).unwrap();
    unlockpt(&person).unwrap();
    let name = ptsname(&person, Vec::new()).unwrap().into_string().unwrap();
    let no_controlling_terminal = OFlags::NOCTTY.bits() as i32;
    let terminal = File::options().read(true).write(true).custom_flags(no_controlling_terminal).open(&name).unwrap();
    tcsetwinsize(&terminal, Winsize { ws_row, ws_col, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
    (File::from(person), terminal, name)
}

impl Watched {
    fn start(command: Command) -> Watched {
        let (person, terminal, _) = terminal(24, 80);
        let stdio = terminal.try_clone().unwrap();
        Watched::start_on(command, person, terminal, stdio)
    }

    /// The terminal that is watched need not be that of the standard streams.
    fn start_on(mut command: Command, person: File, terminal: File, stdio: File) -> Watched {
        let stdio = || stdio.try_clone().unwrap();
        let child = command.stdin(stdio()).stdout(stdio()).stderr(stdio()).env("TERM", "xterm").spawn().unwrap();
        let (sender, written) = channel();
        let mut reader = person.try_clone().unwrap();
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(length @ 1..) = reader.read(&mut buffer) {
                let _ = sender.send(buffer[..length].to_vec());
            }
        });
        Watched { child, person, terminal, written, seen: String::new() }
    }

    /// Waits until this has been written.
    fn shows(&mut self, text: &str) {
        let deadline = Instant::now() + TIMEOUT;
        while !self.seen.contains(text) {
            let left = deadline.saturating_duration_since(Instant::now());
            let Ok(bytes) = self.written.recv_timeout(left) else { panic!("no {text:?} in {:?}", self.seen) };
            self.seen.push_str(&String::from_utf8_lossy(&bytes));
        }
    }

    fn forget(&mut self) {
        self.seen.clear();
    }

    fn press(&mut self, key: &[u8]) {
        self.person.write_all(key).unwrap();
    }

    fn ended(&mut self) -> Option<i32> {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            assert!(Instant::now() < deadline, "it does not end: {:?}", self.seen);
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    }

    /// Whether keys are echoed and come line by line, as a shell wants it.
    fn is_as_it_was(&self) -> bool {
        tcgetattr(&self.terminal).unwrap().local_modes.contains(LocalModes::ICANON | LocalModes::ECHO)
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn on(database: &TestDatabase, arguments: &[&str]) -> Command {
    for_database(graphile_worker(arguments), database)
}

fn for_database(mut command: Command, database: &TestDatabase) -> Command {
    command.env("DATABASE_URL", database.url()).env_remove("COLUMNS").env_remove("NO_COLOR");
    command
}

#[tokio::test]
async fn top_shows_how_to_quit_if_there_is_no_room_for_everything() {
    let database = installed_database().await;
    run_sql(&database, "select graphile_worker.add_job('task_' || n) from generate_series(1, 30) as n").await;
    run_sql(
        &database,
        "select graphile_worker.add_job('t', queue_name => 'queue_' || n) from generate_series(1, 30) as n",
    )
    .await;
    let mut top = Watched::start(on(&database, &["top", "--interval", "100ms"]));
    top.shows(" hidden");
    top.shows("and 21 more");
    top.press(b"q");
    assert_eq!(top.ended(), Some(0));
}

#[tokio::test]
async fn top_uses_the_size_of_the_terminal_that_it_writes_to() {
    let database = installed_database().await;
    run_sql(&database, "select graphile_worker.add_job('task_' || n) from generate_series(1, 30) as n").await;
    // One that does not know its size is taken for one of 80 by 24.
    for (rows, columns, more) in [(10, 80, "hidden"), (0, 0, "and 20 more")] {
        let (person, written_to, name) = terminal(rows, columns);
        let (_somebody_else, controlling, _) = terminal(60, 200);
        let script = r#"exec "$0" top --interval 100ms <"$1" >"$1" 2>"$1""#;
        let mut command =
            for_database(clean(Command::new("setsid"), &["--ctty", "--wait", "sh", "-c", script]), &database);
        command.arg(graphile_worker(&[]).get_program()).arg(name);
        let mut top = Watched::start_on(command, person, written_to, controlling);
        top.shows(more);
        top.press(b"q");
        assert_eq!(top.ended(), Some(0));
    }
}

#[tokio::test]
async fn top_shows_host_process_and_slots_of_each_worker() {
    let database = installed_database().await;
    run_sql(
        &database,
        "select graphile_worker.add_job('t');
         update graphile_worker._private_jobs set locked_at = now(), locked_by = 'rs-live-00112233445566778899aabb';
         insert into graphile_worker._rs_workers (worker_id, version, host, pid, slots)
           values ('rs-live-00112233445566778899aabb', '1.2.3', 'box-7', 4711, 8)",
    )
    .await;
    // On a narrow screen, too.
    let mut top = Watched::start(on(&database, &["top", "--interval", "100ms"]));
    top.shows("q quits");
    let screen = top.seen.clone();
    let line = screen.lines().find(|line| line.contains("box-7")).unwrap_or_else(|| panic!("no host in {screen}"));
    assert!(line.contains("00112233") && line.contains("1/8") && line.contains("4711"), "{line}");
    let titles = screen.lines().find(|line| line.contains("pid")).unwrap();
    assert!(["worker", "state", "jobs", "host"].iter().all(|title| titles.contains(title)), "{titles}");
    top.press(b"q");
    assert_eq!(top.ended(), Some(0));
}

const LEAVES_THE_SCREEN: &str = "\u{1b}[?1049l";

#[tokio::test]
async fn top_redraws_until_q_is_pressed_and_restores_the_terminal() {
    let database = installed_database().await;
    run_sql(&database, "select graphile_worker.add_job('first_task')").await;
    let mut top = Watched::start(on(&database, &["top", "--interval", "100ms"]));
    top.shows("first_task");
    top.shows("q quits");
    assert!(!top.is_as_it_was(), "keys come at once");
    run_sql(&database, "select graphile_worker.add_job('second_task')").await;
    top.shows("second_task");
    top.press(b"x");
    top.forget();
    top.shows("q quits");
    top.press(b"q");
    assert_eq!(top.ended(), Some(0));
    top.shows(LEAVES_THE_SCREEN);
    assert!(top.is_as_it_was());
}

#[tokio::test]
async fn top_ends_by_control_c_and_by_a_signal() {
    let database = installed_database().await;
    for (way, code) in [("control-c", 0), ("TERM", 143)] {
        let mut top = Watched::start(on(&database, &["top"]));
        top.shows("q quits");
        if way == "control-c" {
            top.press(b"\x03");
        } else {
            let pid = top.child.id().to_string();
            assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
        }
        assert_eq!(top.ended(), Some(code), "{way}");
        top.shows(LEAVES_THE_SCREEN);
        assert!(top.is_as_it_was(), "{way}");
    }
}

#[tokio::test]
async fn colours_are_on_a_terminal_only_and_never_with_no_color() {
    let database = installed_database().await;
    run_sql(
        &database,
        "select graphile_worker.add_job('send_email', max_attempts => 1);
         update graphile_worker._private_jobs set attempts = 1",
    )
    .await;
    let mut colourful = Watched::start(on(&database, &["list"]));
    colourful.shows("send_email");
    assert_eq!(colourful.ended(), Some(0));
    assert!(colourful.seen.contains('\u{1b}'), "{:?}", colourful.seen);

    let mut command = on(&database, &["list"]);
    command.env("NO_COLOR", "1");
    let mut plain = Watched::start(command);
    plain.shows("send_email");
    assert_eq!(plain.ended(), Some(0));
    assert!(!plain.seen.contains('\u{1b}'), "{:?}", plain.seen);
}

#[tokio::test]
async fn a_long_file_of_jobs_has_a_progress_bar_on_a_terminal() {
    let database = installed_database().await;
    let folder = crate::support::Folder::new();
    let file = folder.write("jobs.ndjson", &"{\"identifier\":\"t\"}\n".repeat(3000));
    let mut adding = Watched::start(on(&database, &["add", "--file", file.to_str().unwrap()]));
    adding.shows("3000 jobs added");
    assert_eq!(adding.ended(), Some(0));
    assert!(adding.seen.contains("of 3000 jobs"), "{:?}", adding.seen);
}
