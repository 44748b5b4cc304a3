//! The password file (`~/.pgpass`). It is read for each connection, so that a changed password takes effect.
//! The driver's own reader is not used, because it logs lines that it cannot parse.

use std::io::ErrorKind;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use tracing::warn;

/// A worker reads the file for every connection: one warning is enough.
static WARNED: AtomicBool = AtomicBool::new(false);

/// The password in the first matching line.
pub(crate) fn password(file: &Path, host: &str, port: u16, database: &str, user: &str) -> Option<String> {
    let text = match std::fs::read_to_string(file) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => return None,
        Err(error) => {
            if !WARNED.swap(true, Ordering::Relaxed) {
                warn!(label = "worker", file = %file.display(), %error, "could not read the password file");
            }
            return None;
        }
    };
    if is_open_to_others(file) {
        if !WARNED.swap(true, Ordering::Relaxed) {
            let file = file.display();
            warn!(label = "worker", %file, "ignoring the password file, because other users can read it: run chmod 600");
        }
        return None;
    }
    let wanted = [host, &port.to_string(), database, user];
    text.lines().find_map(|line| password_of_line(line, &wanted))
}

#[cfg(unix)]
fn is_open_to_others(file: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    std::fs::metadata(file).is_ok_and(|metadata| metadata.permissions().mode() & 0o077 != 0)
}

#[cfg(not(unix))]
fn is_open_to_others(_: &Path) -> bool {
    false
}

/// Parses `host:port:database:user:password`. `*` matches everything; a backslash escapes the next character.
fn password_of_line(line: &str, wanted: &[&str; 4]) -> Option<String> {
    if line.starts_with('#') {
        return None;
    }
    let mut fields = vec![(String::new(), false)];
    let mut characters = line.chars();
    while let Some(character) = characters.next() {
        let is_last = fields.len() > wanted.len();
        let (field, escaped) = fields.last_mut()?;
        match character {
            '\\' => {
                field.extend(characters.next());
                *escaped = true;
            }
            ':' if !is_last => fields.push((String::new(), false)),
            other => field.push(other),
        }
    }
    let (password, _) = fields.get(wanted.len())?;
    let matches = |((field, escaped), wanted): (&(String, bool), &&str)| field == wanted || (field == "*" && !escaped);
    fields.iter().zip(wanted).all(matches).then(|| password.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_matches_field_by_field() {
        let wanted = ["db.example.com", "5432", "my:db", "me"];
        for (line, password) in [
            (r"db.example.com:5432:my\:db:me:secret", Some("secret")),
            (r"*:*:*:*:p\:a\\ss:word ", Some(r"p:a\ss:word ")),
            (r"\*:*:*:*:secret", None),
            ("#*:*:*:*:secret", None),
            ("*:5433:*:*:secret", None),
            ("*:*:*:me", None),
            ("", None),
        ] {
            assert_eq!(password_of_line(line, &wanted).as_deref(), password, "{line}");
        }
    }
}
