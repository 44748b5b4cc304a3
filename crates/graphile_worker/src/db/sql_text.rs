//! The text of SQL files as it is sent to the server: without comments and indentation. `db` inserts the
//! schema's name.

/// Strips comments and indentation from a file: a server that logs statements logs the whole text each time,
/// and a comment may contain characters that the database's encoding lacks. Quoted text and function bodies
/// stay unchanged, including their comments.
pub(crate) fn without_comments(file: &str) -> String {
    let mut sql = String::with_capacity(file.len());
    let mut rest = file;
    // Whitespace and comments since the last token.
    let mut gap = "";
    while let Some(first) = rest.chars().next() {
        let length = if first.is_ascii_whitespace() {
            rest.find(|c: char| !c.is_ascii_whitespace()).unwrap_or(rest.len())
        } else if rest.starts_with("--") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            block_comment_length(rest)
        } else {
            let length = token_length(rest);
            if !gap.is_empty() && !sql.is_empty() {
                // Two string literals with a line break between them are one literal.
                let is_continued = sql.ends_with('\'') && first == '\'' && gap.contains('\n');
                sql.push(if is_continued { '\n' } else { ' ' });
            }
            sql.push_str(&rest[..length]);
            rest = &rest[length..];
            gap = "";
            continue;
        };
        let end = file.len() - rest.len() + length;
        gap = &file[end - length - gap.len()..end];
        rest = &rest[length..];
    }
    sql
}

/// The length of the comment at the start of the text. Block comments can be nested.
fn block_comment_length(text: &str) -> usize {
    let (mut depth, mut at) = (0, 0);
    while at < text.len() {
        if text[at..].starts_with("/*") {
            (depth, at) = (depth + 1, at + 2);
        } else if text[at..].starts_with("*/") {
            (depth, at) = (depth - 1, at + 2);
            if depth == 0 {
                return at;
            }
        } else {
            at += text[at..].chars().next().map_or(1, char::len_utf8);
        }
    }
    text.len()
}

/// The length of the token at the start of the text: a quoted text, a name or number, or one other character.
fn token_length(text: &str) -> usize {
    let is_name = |c: char| c.is_alphanumeric() || c == '_' || c == '$';
    let first = text.chars().next().unwrap_or_default();
    match first {
        '\'' => quoted_length(text, '\'', false),
        '"' => quoted_length(text, '"', false),
        'e' | 'E' if text[1..].starts_with('\'') => 1 + quoted_length(&text[1..], '\'', true),
        '$' => {
            // `$1` is a parameter; `$$` and `$name$` start a text that ends with the same tag.
            let tag = text[1..].find('$').map(|end| &text[..end + 2]);
            match tag.filter(|tag| is_dollar_tag(&tag[1..tag.len() - 1])) {
                Some(tag) => text[tag.len()..].find(tag).map_or(text.len(), |end| end + 2 * tag.len()),
                None => text[1..].find(|c: char| !is_name(c)).map_or(text.len(), |end| end + 1),
            }
        }
        first if is_name(first) => text.find(|c| !is_name(c)).unwrap_or(text.len()),
        first => first.len_utf8(),
    }
}

fn is_dollar_tag(name: &str) -> bool {
    !name.starts_with(|c: char| c.is_ascii_digit()) && name.chars().all(|c| c.is_alphanumeric() || c == '_')
}

/// The length of the quoted text at the start of the text. A quote in it is doubled, or escaped with a
/// backslash.
fn quoted_length(text: &str, quote: char, has_escapes: bool) -> usize {
    let mut characters = text.char_indices().skip(1).peekable();
    while let Some((at, character)) = characters.next() {
        if has_escapes && character == '\\' {
            characters.next();
        } else if character == quote {
            if characters.peek().is_none_or(|(_, next)| *next != quote) {
                return at + 1;
            }
            characters.next();
        }
    }
    text.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_indentation_are_not_sent() {
        let file = "-- What it is for.\n-- More of it.\nselect\n  a, -- the first\n  b /* the /* nested */ second */ from c;\n";
        assert_eq!(without_comments(file), "select a, b from c;");
        assert_eq!(without_comments("a--b\nc"), "a c");
        assert_eq!(without_comments("a/**/b"), "a b");
        assert_eq!(without_comments("a - -b -- end"), "a - -b");
        assert_eq!(without_comments("  -- nothing\n"), "");
        assert_eq!(without_comments("/* never ends"), "");
    }

    #[test]
    fn quoted_text_is_sent_unchanged() {
        for text in [
            "select '--  no' from \"/*  a\"\" --b\"",
            "select 'it''s  --'",
            r"select e'\'  --', E'\\'",
            "create function f() as $$\n  -- a comment\n  select 'x'\n$$",
            "do $body$ -- $$ /* $body$",
            "select $1::text, $2 - $3",
            "select a$b$c",
            "select ':\u{e9}  --'",
            "select 'one'\n'text'",
            "where '' = '' and \"\" is null",
        ] {
            assert_eq!(without_comments(text), text);
        }
        assert_eq!(without_comments("select $$ -- $$  -- comment\n, $1  -- more"), "select $$ -- $$ , $1");
        assert_eq!(without_comments(r"select name'  --'  || E'\\'  -- c"), r"select name'  --' || E'\\'");
    }

    /// So that the statements can be sent to a database with any encoding.
    #[test]
    fn everything_sent_is_ascii() {
        for folder in ["schema", "queries"] {
            let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("sql").join(folder);
            for entry in std::fs::read_dir(folder).expect("the folder") {
                let path = entry.expect("an entry").path();
                let file = std::fs::read_to_string(&path).expect("a file");
                let sent = without_comments(&file);
                assert!(!sent.is_empty() && sent.is_ascii(), "{}: {sent}", path.display());
                assert!(sent.contains("$$") || !sent.contains("--"), "{}: {sent}", path.display());
            }
        }
    }
}
