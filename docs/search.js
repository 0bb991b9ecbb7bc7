// The order of the search's results: questions of users first; names of the API, and the pages for
// maintainers, last. Included by Sphinx, whose defaults it replaces.
var Scorer = {
  score: ([page, title, anchor, text, score]) => {
    if (/^(changelog|benchmarks|explanation\/(architecture|how-we-know|model))$/.test(page)) {
      return score / 10;
    }
    if (page === "troubleshooting") return score + 4;
    return /^(how-to|tutorials)\//.test(page) ? score + 3 : score;
  },
  // With the priority of functions and classes, 5: above a page that has the word in its text, and
  // below one that has it in a heading.
  objNameMatch: 4,
  objPartialMatch: -2,
  objPrio: { 0: 5, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};

// Sphinx finds an entry of the index only if the question is a part of its text: "unit tests" does not find "unit test".
// Here an entry is found by its words, in any form and order, also among other words. A word that no page has does not
// count, and if no page has all words, those are found that have most of them.
{
  const performSearch = Search._performSearch;

  const wordsOf = (text) => splitQuery(text.toLowerCase());

  const stems = (words) => {
    const stemmer = new Stemmer();
    return new Set(words.map((word) => stemmer.stemWord(word)));
  };

  const whatItMeans = (words) => words.filter((word) => !/^(what|is|are|an?|the|does|means?)$/.test(word));

  const withoutStopwords = (words) => words.filter((word) => !stopwords.has(word));

  // The share of the question's words that the entry has; 0 if the entry has a word that the question has not. Words
  // such as "only" count where they are half of an entry: "run only once" is not found by "run".
  const share = (entry, question) => {
    const isMeant = withoutStopwords(entry).length * 2 > entry.length;
    const [has, asked] = [entry, question].map((words) => stems(isMeant ? withoutStopwords(words) : words));
    return has.size && [...has].every((word) => asked.has(word)) ? has.size / asked.size : 0;
  };

  const same = (one, other) => one.size === other.size && [...one].every((each) => other.has(each));

  const entriesFor = (question) => {
    const { docnames, filenames, indexentries, titles } = Search._index;
    const found = new Map();
    for (const [entry, places] of Object.entries(indexentries)) {
      const words = wordsOf(entry);
      // "celery-once" is one name, and not "celery ... once".
      if (entry.includes("-") && !` ${question.join(" ")} `.includes(` ${words.join(" ")} `)) continue;
      const [matched, isAsked] = [share(words, question), same(stems(words), stems(whatItMeans(question)))];
      for (const [file, id, isMain] of places) {
        if (!isMain || !matched) continue;
        const place = [docnames[file], titles[file], id ? `#${id}` : "", null];
        const result = [...place, Math.round(100 * (isAsked ? 1 : matched)), filenames[file], SearchResultKind.index];
        result[4] = Scorer.score(result);
        if (!(found.get(place.join())?.[4] >= result[4])) found.set(place.join(), result);
      }
    }
    return [...found.values()];
  };

  const isKnown = (word) => {
    const { terms, titleterms } = Search._index;
    return [terms, titleterms].some((words) => Object.keys(words).some((each) => each.includes(word)));
  };

  const pagesWithMostOf = (terms) => {
    const found = new Map();
    for (const term of terms) {
      for (const result of Search.performTermsSearch(new Set([term]), new Set())) {
        result[4] /= terms.size;
        const known = found.get(result[0]);
        if (known) known[4] += result[4];
        else found.set(result[0], result);
      }
    }
    const pages = [...found.values()];
    pages.forEach((page) => (page[4] = Scorer.score(page)));
    return pages.sort(_orderResultsByScoreThenName).slice(-10);
  };

  // The last result is shown first. Results that Sphinx puts last whatever their score stay there.
  Search._performSearch = (query, searchTerms, ...others) => {
    const known = new Set([...searchTerms].filter(isKnown));
    const found = performSearch(query, known, ...others);
    const results = found.length ? found : pagesWithMostOf(known);
    for (const entry of entriesFor(wordsOf(query))) {
      const shown = results.findIndex((one) => one[0] === entry[0] && one[2] === entry[2] && one[6] === entry[6]);
      if (shown >= 0 && results[shown][4] >= entry[4]) continue;
      if (shown >= 0) results.splice(shown, 1);
      const above = results.findLastIndex((one) => one[4] <= entry[4]);
      results.splice(above + 1, 0, entry);
    }
    return results;
  };
}
