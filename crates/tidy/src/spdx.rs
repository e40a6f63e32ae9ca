// SPDX-License-Identifier: Apache-2.0
//! Licence expressions as crates state them: `OR`, `AND`, `WITH`, parentheses, and the `/` that stood for `OR`.
//! Not a list of licences: a name is allowed if it is in the list that is given.

/// Whether some choice that the expression offers consists of allowed licences only. A licence with an exception
/// counts as one name, such as `Apache-2.0 WITH LLVM-exception`.
pub fn is_allowed(expression: &str, allow: &[String]) -> Result<bool, String> {
    let spaced = expression.replace('(', " ( ").replace(')', " ) ").replace('/', " OR ");
    let mut parser = Parser { words: spaced.split_whitespace().collect(), at: 0, allow };
    let allowed = parser.any_of()?;
    match parser.next() {
        None => Ok(allowed),
        Some(word) => Err(format!("{expression:?}: unexpected {word:?}")),
    }
}

struct Parser<'a> {
    words: Vec<&'a str>,
    at: usize,
    allow: &'a [String],
}

impl<'a> Parser<'a> {
    fn next(&mut self) -> Option<&'a str> {
        let word = self.words.get(self.at).copied();
        self.at += 1;
        word
    }

    /// Goes past a word if it is the next.
    fn skip(&mut self, word: &str) -> bool {
        let found = self.words.get(self.at) == Some(&word);
        self.at += usize::from(found);
        found
    }

    fn any_of(&mut self) -> Result<bool, String> {
        let mut allowed = self.all_of()?;
        while self.skip("OR") {
            // Both sides are parsed whatever the first says.
            allowed |= self.all_of()?;
        }
        Ok(allowed)
    }

    fn all_of(&mut self) -> Result<bool, String> {
        let mut allowed = self.one()?;
        while self.skip("AND") {
            allowed &= self.one()?;
        }
        Ok(allowed)
    }

    fn one(&mut self) -> Result<bool, String> {
        if self.skip("(") {
            let allowed = self.any_of()?;
            return if self.skip(")") { Ok(allowed) } else { Err(self.problem("no ')'")) };
        }
        let mut name = self.name()?.to_owned();
        if self.skip("WITH") {
            name = format!("{name} WITH {}", self.name()?);
        }
        Ok(self.allow.contains(&name))
    }

    fn name(&mut self) -> Result<&'a str, String> {
        match self.next() {
            Some(word) if !["(", ")", "AND", "OR", "WITH"].contains(&word) => Ok(word),
            Some(word) => Err(self.problem(&format!("{word:?} where a licence should be"))),
            None => Err(self.problem("ends where a licence should be")),
        }
    }

    fn problem(&self, what: &str) -> String {
        format!("{:?}: {what}", self.words.join(" "))
    }
}
